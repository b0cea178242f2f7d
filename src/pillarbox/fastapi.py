"""What FastAPI adds to the ASGI middleware: the header of idempotency keys as a parameter, which its docs then show."""

from typing import Annotated, Final, TypeAlias

from fastapi import Header

_DESCRIPTION: Final = (
    "Names the request: a request that is sent again with the same key has one effect, and gets the same answer. "
    "1 to 255 printable ASCII characters, for example a UUID."
)

#: A parameter of a path operation: the text of the header, or None. The middleware reads the header by itself.
IdempotencyKey: TypeAlias = Annotated[str | None, Header(alias="Idempotency-Key", description=_DESCRIPTION)]
