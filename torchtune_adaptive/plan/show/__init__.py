"""A plan as text, tables, pictures and files."""
