"""What a database has to offer, and each database.

base             the protocol, and which database a url means
sqlite           SQLite
sqlite_files     its files, before SQLite reads them
sqlite_copies    copies of it
sqlite_errors    what its errors mean
postgres         PostgreSQL
postgres_url     its urls
postgres_types   its types
postgres_errors  what its errors mean
"""
