"""What every test can use."""

pytest_plugins = ["servers.fixtures"]
