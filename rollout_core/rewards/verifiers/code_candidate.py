"""The program's side of unit tests: it loads the program as a module, says which names it has, and does what the tests
ask of it. What it says is the program's word; the tests judge it in a process of their own.
"""

import sys
import types

from rollout_core.rewards.verifiers.code_peer import Lost, Peer

NAME = "solution"


def main():
    """Until the tests end."""
    peer = Peer(3, may_look=True)
    module = types.ModuleType(NAME)
    module.__file__ = f"{NAME}.py"
    sys.modules[NAME] = module
    with open(module.__file__, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    try:
        exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:  # noqa: BLE001 - whatever it raises, it is no module
        peer.send({"failed": f"{type(error).__name__}: {error}"[:500]})
        return
    modules = {name: value.__name__ for name, value in vars(module).items() if isinstance(value, types.ModuleType)}
    names = {name: value for name, value in vars(module).items() if not name.startswith("__") and name not in modules}
    peer.send({"names": [[name, peer.encode(value)] for name, value in names.items()], "modules": modules})
    try:
        while True:
            peer.answer(peer.receive())
    except Lost:
        return


if __name__ == "__main__":
    main()
