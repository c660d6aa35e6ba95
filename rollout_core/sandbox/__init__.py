"""Walls for programs of others: namespaces, seccomp, landlock, limits; and a report of those that this machine has.

`Sandbox.run` runs one, in a few milliseconds. `programs` says what a program is and how it ended; `sandbox` chooses
what runs it: `launching`, by the launcher (`launcher`, `modes`, `root`, `inside`, `kernel`, `call_filter`, all of the
standard library alone); `commands`, by docker or another command; `remote`, by a `service` on another machine. `walls`
has a hostile program, `probe`, try them.

Names are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
