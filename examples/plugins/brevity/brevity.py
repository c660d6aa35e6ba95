"""1 for an answer of at most ``limit`` characters, falling to 0 at twice as many."""


def create_plugin(config):
    limit = config.get("limit", 100)

    def reward(sample):
        excess = len(sample.completion) - limit
        return max(0.0, min(1.0, 1.0 - excess / limit))

    return reward
