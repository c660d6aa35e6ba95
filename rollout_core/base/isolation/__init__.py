"""Other people's code in a process of its own, whose end is seen: it may hang, fork, exit, flood its output or eat
memory, and nothing but its call fails.

`Child` (`child.py`) is what a caller uses: values go to a handler in the child and come back. Between the two stands a
warden (`warden.py`), the parent of the process that runs the code and of all that this one starts. It counts processes
and memory, and ends all of them when a limit is passed, when the caller says so, and when the caller dies.

It contains accidents. It is no wall: the code runs as the same user and can read and end what this user may.
"""
