"""Reports of comparisons: one self-contained HTML page, a Markdown table and a plot."""

from gossamer.report.fields import ReportError
from gossamer.report.page import write_report
from gossamer.report.tables import claim, markdown_table, quality_plot_svg

__all__ = ["ReportError", "claim", "markdown_table", "quality_plot_svg", "write_report"]
