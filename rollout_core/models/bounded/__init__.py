"""Work on untrusted files (templates, tokenizers, configurations, adapters) in child processes with limits.

What it takes to render a chat template, to tokenise a text or to build a model is for the files of a model folder to
say, and files may say anything. So it is done where it can be ended (`rollout_core.base.isolation`). ``texts`` runs
in a child, which ``tokenizing`` asks; of ``inspecting`` each side has its part.
"""
