"""Training files, data sets in a folder, and previews of both."""
