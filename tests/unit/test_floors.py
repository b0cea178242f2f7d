"""The floors of PostgreSQL reads, against a model of a server whose transactions commit in any order."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from pillarbox.store import Grant
from pillarbox.stores.postgres.floors import Floors

GRANT = Grant("orders", 0, "ann", 1)


@dataclass
class Transaction:
    xid: int | None = None
    seqs: list[int] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)


@dataclass
class Look:
    """One look that is under way: its snapshot comes first, then its id and the sequence in any order."""

    xmin: int
    xid: int | None = None
    last: int | None = None


@dataclass
class Read:
    """One read that is under way."""

    begun: float
    start: int
    found: list[int]


class Server:
    """As much of PostgreSQL as the floors depend on: one shard, seqs, transaction ids and snapshots."""

    def __init__(self) -> None:
        self.now = 100.0
        self.last = 0
        self.next_xid = 1000
        self.highest_ended = 999
        self.open: list[Transaction] = []
        self.keys: dict[int, str] = {}  # of every seq that was taken
        self.pending: set[int] = set()  # visible and not yet published
        self.published: list[int] = []

    def new_xid(self) -> int:
        self.next_xid += 1
        return self.next_xid - 1

    def write(self, transaction: Transaction, key: str) -> int:
        """Insert a row: the transaction has its id before it takes the seq."""
        if transaction not in self.open:
            transaction.xid = self.new_xid()
            self.open.append(transaction)
        self.last += 1
        transaction.seqs.append(self.last)
        transaction.keys.add(key)
        self.keys[self.last] = key
        return self.last

    def end(self, transaction: Transaction, *, commit: bool = True) -> None:
        self.open.remove(transaction)
        self.highest_ended = max(self.highest_ended, transaction.xid or 0)
        if commit:
            self.pending.update(transaction.seqs)

    def locked(self) -> set[str]:
        """Writers of a key are serialised: its lock is held until the end of the transaction."""
        return {key for transaction in self.open for key in transaction.keys}

    def look(self) -> Look:
        # As PostgreSQL does it: a snapshot ends behind the highest id that has ended, whatever is under way above it.
        xmax = self.highest_ended + 1
        running = [transaction.xid for transaction in self.open if transaction.xid and transaction.xid < xmax]
        return Look(min([*running, xmax]))

    def read(self, start: int) -> Read:
        found = sorted(seq for seq in self.pending if seq >= start)
        for missed in self.pending - set(found):
            later = [seq for seq in found if self.keys[seq] == self.keys[missed]]
            assert not later, f"a read from {start} gives {later} of key {self.keys[missed]} before {missed}"
        return Read(self.now, start, found)

    def settle(self, seqs: list[int]) -> None:
        self.pending -= set(seqs)
        self.published += seqs


class Reader:
    """A store that reads one shard of that server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.floors = Floors()

    def begin_look(self) -> Look | None:
        return self.server.look() if self.floors.look_due(self.server.now) else None

    def end_look(self, look: Look) -> None:
        last = self.server.last if look.last is None else look.last
        xid = self.server.new_xid() if look.xid is None else look.xid
        self.server.highest_ended = max(self.server.highest_ended, xid)
        self.floors.looked(self.server.now, last, xid, look.xmin)

    def begin_read(self) -> Read:
        return self.server.read(self.floors.start(GRANT, self.server.now))

    def end_read(self, read: Read) -> None:
        lowest = read.found[0] if read.found else None
        self.floors.done(GRANT, read.start, lowest, read.begun, self.server.now)
        self.server.settle(read.found)

    def look_and_read(self) -> None:
        look = self.begin_look()
        if look is not None:
            self.end_look(look)
        self.end_read(self.begin_read())

    def rest(self, seconds: float) -> None:
        """Reads as a busy worker would, for so long."""
        until = self.server.now + seconds
        while self.server.now < until:
            self.server.now += 0.3
            self.look_and_read()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def reader(server: Server) -> Reader:
    return Reader(server)


def test_the_floor_rises_above_what_is_settled(server: Server, reader: Reader) -> None:
    for _ in range(50):
        transaction = Transaction()
        server.write(transaction, "k")
        server.end(transaction)
        reader.rest(0.3)
    assert server.published == list(range(1, 51))
    reader.rest(2.0)
    assert reader.floors.floor(GRANT) == 51


def test_the_floor_waits_for_an_open_transaction(server: Server, reader: Reader) -> None:
    slow = Transaction()
    held = server.write(slow, "slow")
    for _ in range(20):
        quick = Transaction()
        server.write(quick, "quick")
        server.end(quick)
        reader.rest(0.6)
    assert reader.floors.floor(GRANT) <= held
    server.end(slow)
    after = Transaction()
    server.write(after, "slow")
    server.end(after)
    reader.rest(0.3)
    assert [seq for seq in server.published if server.keys[seq] == "slow"] == [held, after.seqs[0]]


def test_a_rolled_back_seq_does_not_hold_the_floor_for_ever(server: Server, reader: Reader) -> None:
    gone = Transaction()
    server.write(gone, "k")
    server.end(gone, commit=False)
    reader.rest(3.0)
    assert reader.floors.floor(GRANT) == 2


def test_a_sweep_starts_at_the_beginning_about_once_a_second(server: Server, reader: Reader) -> None:
    reader.rest(3.0)
    starts = []
    for _ in range(40):
        server.now += 0.1
        read = reader.begin_read()
        reader.end_read(read)
        starts.append(read.start)
    assert 3 <= starts.count(0) <= 5


def test_a_slow_sweep_takes_a_small_share_of_the_time() -> None:
    assert Floors.next_sweep(100.0, 100.001) == pytest.approx(101.001)
    assert Floors.next_sweep(100.0, 102.0) == pytest.approx(142.0)


def test_a_sweep_that_was_asked_for_comes_with_the_next_read(server: Server, reader: Reader) -> None:
    one = Transaction()
    server.write(one, "k")
    server.end(one)
    reader.rest(3.0)
    floors = reader.floors
    assert floors.start(GRANT, server.now) == 2
    floors.sweep(GRANT)
    assert floors.start(GRANT, server.now) == 0
    reader.look_and_read()
    floors.sweep_all()
    assert floors.start(GRANT, server.now) == 0


def test_a_shard_that_was_given_away_is_read_from_the_beginning_again(server: Server, reader: Reader) -> None:
    one = Transaction()
    server.write(one, "k")
    server.end(one)
    reader.rest(3.0)
    reader.floors.forget([GRANT])
    assert reader.floors.floor(GRANT) == 0
    assert reader.floors.start(GRANT, server.now) == 0


def test_a_shard_that_is_given_away_while_it_is_read_has_no_floor(server: Server, reader: Reader) -> None:
    reader.rest(3.0)
    read = reader.begin_read()
    reader.floors.forget([GRANT])
    reader.end_read(read)
    assert reader.floors.floor(GRANT) == 0


def test_a_look_during_a_read_does_not_lift_the_floor_over_what_that_read_could_not_see(
    server: Server, reader: Reader
) -> None:
    slow = Transaction()
    first = server.write(slow, "k")
    reader.rest(3.0)
    read = reader.begin_read()
    server.end(slow)  # committed after the snapshot of that read
    server.now += 0.3
    look = reader.begin_look()  # by another slot
    assert look is not None
    reader.end_look(look)
    reader.end_read(read)
    after = Transaction()
    second = server.write(after, "k")
    server.end(after)
    reader.look_and_read()
    reader.rest(2.0)
    assert server.published == [first, second]


def test_two_looks_at_once_do_not_lift_the_floor_over_an_open_transaction(server: Server, reader: Reader) -> None:
    reader.look_and_read()
    server.now += 0.3
    early = reader.begin_look()
    assert early is not None
    early.last = server.last
    late = reader.begin_look()  # by another slot, while the answer of the first is on its way
    slow = Transaction()
    first = server.write(slow, "k")
    if late is not None:
        reader.end_look(late)
    reader.end_look(early)
    reader.rest(3.0)
    assert reader.floors.floor(GRANT) <= first
    server.end(slow)
    after = Transaction()
    second = server.write(after, "k")
    server.end(after)
    reader.rest(2.0)
    assert server.published == [first, second]


def test_an_open_transaction_above_all_that_have_ended_is_not_passed(server: Server, reader: Reader) -> None:
    other, slow = Transaction(), Transaction()
    server.write(other, "o")
    first = server.write(slow, "k")  # its id is the highest: no snapshot reaches up to it
    reader.rest(1.0)
    server.end(other)
    reader.rest(1.0)
    assert reader.floors.floor(GRANT) <= first
    server.end(slow)
    after = Transaction()
    second = server.write(after, "k")
    server.end(after)
    reader.rest(0.3)
    assert [seq for seq in server.published if server.keys[seq] == "k"] == [first, second]


def test_a_seq_that_is_taken_between_a_looks_id_and_its_view_of_the_sequence_is_not_passed(
    server: Server, reader: Reader
) -> None:
    look = reader.begin_look()
    assert look is not None
    look.xid = server.new_xid()
    slow = Transaction()
    first = server.write(slow, "k")
    reader.end_look(look)
    reader.rest(2.0)
    assert reader.floors.floor(GRANT) <= first


def test_a_long_transaction_does_not_make_the_list_of_looks_grow_for_ever(server: Server, reader: Reader) -> None:
    slow = Transaction()
    server.write(slow, "slow")
    reader.rest(1000.0)
    quick = Transaction()
    server.write(quick, "quick")
    server.end(quick)
    assert len(reader.floors._bounds) <= 1000
    server.end(slow)
    reader.rest(3.0)
    assert reader.floors.floor(GRANT) == 3


class FloorsMachine(RuleBasedStateMachine):
    """Transactions, looks and reads in any order; the server's own read asserts that no key is overtaken."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        self.reader = Reader(self.server)
        self.looks: list[Look] = []
        self.reading: Read | None = None

    def _pick(self, data: st.DataObject, items: list[Any]) -> Any:
        return items[data.draw(st.integers(0, len(items) - 1))]

    @rule(seconds=st.sampled_from([0.05, 0.3, 0.9, 2.0]))
    def tick(self, seconds: float) -> None:
        self.server.now += seconds

    @rule(key=st.sampled_from("abc"))
    def begin(self, key: str) -> None:
        if key not in self.server.locked():
            self.server.write(Transaction(), key)

    @precondition(lambda self: self.server.open)
    @rule(data=st.data(), key=st.sampled_from("abc"))
    def write_more(self, data: st.DataObject, key: str) -> None:
        transaction = self._pick(data, self.server.open)
        if key in transaction.keys or key not in self.server.locked():
            self.server.write(transaction, key)

    @precondition(lambda self: self.server.open)
    @rule(data=st.data(), commit=st.booleans())
    def end(self, data: st.DataObject, commit: bool) -> None:
        self.server.end(self._pick(data, self.server.open), commit=commit)

    @rule()
    def begin_look(self) -> None:
        look = self.reader.begin_look()
        if look is not None:
            self.looks.append(look)

    @precondition(lambda self: self.looks)
    @rule(data=st.data())
    def see_last(self, data: st.DataObject) -> None:
        look = self._pick(data, self.looks)
        if look.last is None:
            look.last = self.server.last

    @precondition(lambda self: self.looks)
    @rule(data=st.data())
    def number_look(self, data: st.DataObject) -> None:
        look = self._pick(data, self.looks)
        if look.xid is None:
            look.xid = self.server.new_xid()

    @precondition(lambda self: self.looks)
    @rule(data=st.data())
    def end_look(self, data: st.DataObject) -> None:
        look = self._pick(data, self.looks)
        self.looks.remove(look)
        self.reader.end_look(look)

    @rule()
    def look(self) -> None:
        if not self.looks:
            self.begin_look()
            if self.looks:
                self.reader.end_look(self.looks.pop())

    @precondition(lambda self: self.reading is None)
    @rule()
    def begin_read(self) -> None:
        self.reading = self.reader.begin_read()

    @precondition(lambda self: self.reading is not None)
    @rule()
    def end_read(self) -> None:
        assert self.reading is not None
        self.reader.end_read(self.reading)
        self.reading = None

    def teardown(self) -> None:
        """At rest everything that was committed has been read."""
        while self.looks:
            self.reader.end_look(self.looks.pop())
        if self.reading is not None:
            self.reader.end_read(self.reading)
        for transaction in list(self.server.open):
            self.server.end(transaction)
        self.reader.rest(3.0)
        assert not self.server.pending
        for key in "abc":
            seqs = [seq for seq in self.server.published if self.server.keys[seq] == key]
            assert seqs == sorted(seqs)


TestFloorsMachine = FloorsMachine.TestCase
TestFloorsMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
