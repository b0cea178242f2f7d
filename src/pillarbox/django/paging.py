"""Pages of a table that may have millions of rows: nothing is counted."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.core.paginator import Page, Paginator

if TYPE_CHECKING:
    _Paginator = Paginator[Any]
    _Page = Page[Any]
else:
    _Paginator, _Page = Paginator, Page  # generic for type checkers only


class UncountedPaginator(_Paginator):
    """Knows the rows up to the page that is shown, and whether there is another page."""

    def __init__(self, object_list: Any, per_page: int, page: int = 1) -> None:
        super().__init__(object_list, per_page)
        start = (max(page, 1) - 1) * per_page
        self._shown: Sequence[Any] = list(object_list[start : start + per_page + 1])
        self.count = start + len(self._shown) if self._shown or page <= 1 else 0

    def page(self, number: Any) -> _Page:
        return Page(self._shown[: self.per_page], self.validate_number(number), self)
