from .launching import Session as Session
from .programs import (
    LANGUAGES as LANGUAGES,
    Limits as Limits,
    Outcome as Outcome,
    Program as Program,
)
from .sandbox import (
    Sandbox as Sandbox,
    SandboxSettings as SandboxSettings,
)
from .walls import (
    NoSandbox as NoSandbox,
    Wall as Wall,
    Walls as Walls,
)
