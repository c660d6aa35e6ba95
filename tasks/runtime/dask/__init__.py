"""Workers of a Dask cluster. Imported only where a run asks for one: Dask is an extra."""
