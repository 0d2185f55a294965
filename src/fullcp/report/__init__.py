"""Results for people to read."""

from fullcp.report.tables import print_table, write_csv

__all__ = ["print_table", "write_csv"]
