"""When drafts are looked for: not in each step where there were none for long, and not where the search loses (worth.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.scheduler.drafts.watch import Watch
from ridgeline.scheduler.drafts.worth import Worth

OFF_RUN = 3                          # steps in a row without drafts, of which the last shows what such steps take
OFF_SOON = 16                        # steps after these, at least, before there are some again
_PATIENCE = 8                        # steps in vain, and again as many, and again …
_MOST_SKIPPED = 4                    # … before it is asked in each second step only, each third, and so on up to this


@dataclass(slots=True)
class Search:
    last_drafted: int = 0            # the step in which there were drafts …
    in_vain: int = 0                 # … and how often they were looked for since
    skipped: int = 0                 # steps in which they were not looked for, since they were
    last_off: int = 0                # the step that was to measure those without drafts, and …
    off_run: int = OFF_RUN           # … how many these are, …
    off_left: int = 0                # … and are to come
    doubt: int = OFF_SOON            # so many steps later it is asked whether what they took can be right
    quiet: int = 0                   # plans since drafts were looked for
    slept: int = 0                   # steps of a rest that came back, and were not timed
    probing: bool = False            # does the newest step with drafts have them only to learn?
    again: bool = False              # is the next one to be such a step, too?
    watch: Watch = field(default_factory=Watch)
    worth: Worth = field(default_factory=Worth)

    @property
    def will_look(self) -> bool:
        """What due() will say next."""
        return not self.worth.rests and self.skipped + 1 >= min(_MOST_SKIPPED, 1 + self.in_vain // _PATIENCE)

    def due(self) -> bool:
        looks = self.will_look
        if not self.worth.rests:
            self.skipped = 0 if looks else self.skipped + 1
        return looks

    def sleeps(self, rows: int) -> bool:
        """A step has come back in the middle of a rest, and is counted."""
        if self.quiet < OFF_RUN or not self.worth.slept(rows):
            return False
        self.slept += 1
        return True
