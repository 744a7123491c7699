"""What tables and sentences are printed with: colours and box characters on a terminal, plain text anywhere else."""

from rich.console import Console, ConsoleDimensions
from rich.markup import escape
from rich.rule import Rule

ENDLESS_COLUMNS, RULE_COLUMNS = 100_000, 80


class PlainConsole(Console):
    """On stdout, whatever that is when something is printed; `NO_COLOR` and `TERM` are obeyed, as rich does.

    Where there is no terminal, a table is as wide as it needs, unless `COLUMNS` says how wide it may be.

    Args:
        soft_wrap: Lines as long as they are, for what is copied; tables that are to be folded at the terminal's width
            want none.
    """

    def __init__(self, soft_wrap: bool = True) -> None:
        super().__init__(highlight=False, soft_wrap=soft_wrap)

    @property
    def encoding(self) -> str:
        """Tell rich that there are no box characters where there is no terminal; the text itself stays as it is."""
        return super().encoding if self.is_terminal else "ascii"

    @property  # type: ignore[misc]  # nobody sets it
    def size(self) -> ConsoleDimensions:
        size = super().size
        limited = self.is_terminal or self.is_jupyter or self._environ.get("COLUMNS", "").isdigit()
        return size if limited else ConsoleDimensions(ENDLESS_COLUMNS, size.height)

    def look_again(self) -> None:
        """Look again at where stdout leads, and at the environment."""
        PlainConsole.__init__(self, self.soft_wrap)


console = PlainConsole()


def heading(stage: str, what: str) -> None:
    """Print a rule across the terminal. `what` may hold names of the user's, which are no markup."""
    rule = Rule(f"[bold]{stage}[/bold]  {escape(what)}")
    console.print(rule, width=RULE_COLUMNS if console.width == ENDLESS_COLUMNS else None)
