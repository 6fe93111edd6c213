"""Training files, datasets in a folder or on the hub, and previews and token lengths of files."""
