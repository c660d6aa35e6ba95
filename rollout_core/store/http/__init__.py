"""The store over HTTP: an application, a server around it, and a client."""
