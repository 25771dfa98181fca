"""Models behind a server: the same questions over HTTP that the workbench asks its own."""
