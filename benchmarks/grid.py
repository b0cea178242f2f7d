"""Rows for the plot of throughput by batch and slots, against our default settings."""

from benchmarks.bed import Bed
from benchmarks.drains import BATCH, SLOTS, Drains
from benchmarks.load import fill_postgres
from benchmarks.report import Row
from benchmarks.scale import Scale

# A shard of this backlog has more than twice the largest batch.
BATCHES = (100, 500, BATCH, 5000)
SLOT_COUNTS = (1, 2, SLOTS, 8)


def grid(bed: Bed, scale: Scale) -> list[Row]:
    """Measure all settings in each round."""
    name, events = "postgres-grid", scale.events
    drains = Drains(bed, name)
    cells = [(batch, slots) for slots in SLOT_COUNTS for batch in BATCHES]
    found: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    for _ in range(scale.rounds):
        for batch, slots in cells:
            cell = drains.run("ours", events, lambda: fill_postgres(bed.url, events), batch=batch, slots=slots)
            found[batch, slots].append(cell["per_second"])
    drains.close()
    return [
        Row(
            f"{name}-{batch}x{slots}",
            "events/s",
            found[batch, slots],
            found[BATCH, SLOTS],
            {"batch": batch, "slots": slots},
            against="defaults",
        )
        for batch, slots in cells
    ]
