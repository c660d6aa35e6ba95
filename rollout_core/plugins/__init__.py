"""Code of others that is added without a fork: folders and packages with a ``rollout-plugin.toml``. What they say of
themselves, where they are found, what of them enters ids, and the processes that they run in.

A kind of plugin is used by the room that has the kind, such as rewards by `rollout_core.rewards.plugin_rewards`; this
room knows of none what it answers.
"""
