"""What every test can use."""

pytest_plugins = ["tests.servers.fixtures"]
