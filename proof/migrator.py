"""A migration that kills itself after a moment: `python -m proof.migrator URL PREFIX SECONDS`"""

import asyncio
import os
import signal
import sys
import threading

from pillarbox.urls import store_from_url


async def migrate(url: str, prefix: str) -> None:
    """Create or complete an outbox. Raises if it cannot be used afterwards."""
    store = store_from_url(url, prefix=prefix)
    await store.migrate()
    await store.open()
    await store.close()


def main() -> None:
    url, prefix, seconds = sys.argv[1:]
    threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()
    asyncio.run(migrate(url, prefix))


if __name__ == "__main__":
    main()
