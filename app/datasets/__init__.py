"""Training files, datasets in a folder, and previews of both."""
