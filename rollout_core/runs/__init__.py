"""Records of flow runs: what each was asked, what its stages did and what came of it; and how two of them compare."""
