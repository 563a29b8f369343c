"""Where the numbers of each step go: ``stats.jsonl``, TensorBoard, a console table, and online trackers by config."""

from areal.utils.stats_logger.jsonl import read_stats
from areal.utils.stats_logger.logger import StatsLogger, tabulate_stats

__all__ = ["StatsLogger", "read_stats", "tabulate_stats"]
