"""The database: engine and sessions, tables, migrations, compiled statements, ids and ownership."""
