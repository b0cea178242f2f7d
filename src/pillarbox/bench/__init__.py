"""Measures a store and a destination with the real relay, on an outbox of its own."""

from pillarbox.bench.clocks import Nowhere
from pillarbox.bench.figures import Figures, Scale
from pillarbox.bench.measuring import measure
from pillarbox.bench.own_outbox import BenchFailed, Make, clean, remains

__all__ = ["BenchFailed", "Figures", "Make", "Nowhere", "Scale", "clean", "measure", "remains"]
