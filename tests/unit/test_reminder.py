from pillarbox.publishers._reminder import MOST_NAMES, Reminder


def test_a_warning_is_due_at_once_and_then_once_a_minute() -> None:
    now = 0.0
    reminder = Reminder(lambda: now)
    due = []
    for instant in (0.0, 59.0, 60.0, 61.0):
        now = instant
        due.append(reminder.is_due("a"))
    assert due == [True, False, True, False]
    assert reminder.is_due("b")


def test_it_does_not_grow_without_end() -> None:
    reminder = Reminder(lambda: 0.0)
    assert all(reminder.is_due(str(number)) for number in range(MOST_NAMES + 1))
    assert reminder.is_due("0")
    assert not reminder.is_due("0")
