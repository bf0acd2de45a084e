"""How a database gets from any earlier schema to today's. Only operations that every database has."""
