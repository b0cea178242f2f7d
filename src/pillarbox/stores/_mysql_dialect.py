"""How MySQL and MariaDB say what the shared statements mean; without a driver, for writers bring their own."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from pillarbox.stores.sql.statements import Dialect

DIALECT = Dialect(
    # Not NOW(), which follows the session's time zone.
    now="UTC_TIMESTAMP(6)",
    later="TIMESTAMPADD(MICROSECOND, {} * 1000000, UTC_TIMESTAMP(6))",
    among="IN {}",
    has_meta="FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = '{meta}'",
    tables="table_name FROM information_schema.tables WHERE table_schema = DATABASE() AND table_type = 'BASE TABLE'",
    version="version()",
    param="%",
    skip_locked="FOR UPDATE SKIP LOCKED",
    share_lock="LOCK IN SHARE MODE",
    update_lock="FOR UPDATE",
    # Forced, because the planner likes the primary key, and a scan waits for rows that others have locked.
    use_ready="FORCE INDEX ({ready_index})",
    use_due="FORCE INDEX ({due_index})",
    use_aside="FORCE INDEX ({aside_index})",
    # What is being worked is little: the status is enough to find it.
    use_leased="FORCE INDEX ({ready_index})",
    use_id="FORCE INDEX (by_id)",
    delete_event="DELETE {event} FROM {event} FORCE INDEX (by_id)",
    upsert="ON DUPLICATE KEY UPDATE",
    ignore="ON DUPLICATE KEY UPDATE {0} = {0}",
    key="`key`",
    # The same number that a writer stores as key_hash.
    aside="aside_hash = CRC32(:key) & 2147483647 AND key = :key AND status IN ('failed', 'held')",
    history="CONCAT(errors, {newline}, :line)",
    newline="CHAR(10 USING utf8mb4)",
    integer="signed",
)


def cell(value: Any) -> Any:
    """A parameter as every driver takes it: ids as bytes, instants in UTC without a zone."""
    if isinstance(value, UUID):
        return value.bytes
    if isinstance(value, datetime):
        return value.astimezone(UTC).replace(tzinfo=None)
    return value
