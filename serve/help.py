"""Plain ``--help`` with the flags of a command in groups, and no flag's name cut off."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class GroupedHelp(TyperCommand):
    """A command whose help shows one section a ``rich_help_panel`` of its options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                argument = parameter.param_type_name == "argument"
                default = "Arguments" if argument else "Options"
                title = getattr(parameter, "rich_help_panel", None) or default
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)
