"""What a store and a destination can do together, measured with the real relay on an outbox of its own."""

from pillarbox.bench.clocks import Nowhere
from pillarbox.bench.figures import Figures, Scale
from pillarbox.bench.measuring import measure
from pillarbox.bench.own_outbox import BenchFailed, Make, OwnStore, clean, remains

__all__ = ["BenchFailed", "Figures", "Make", "Nowhere", "OwnStore", "Scale", "clean", "measure", "remains"]
