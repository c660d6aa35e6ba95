"""Tools that a model may call in an episode: `toolbox` holds those of one, a file for each kind has the rest."""
