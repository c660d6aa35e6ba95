"""Model folders: found, checked, imported, loaded."""
