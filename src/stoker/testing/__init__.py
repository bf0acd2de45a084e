"""Conformance suites and fakes, for the tests of Stoker and of other engines and stores.

engine_suite    EngineSuite: requirements of every engine
taskdir_suite   TaskDirSuite: requirements of every kind of task directory
store_suite     requirements of every store
store_case      shared by the parts of that suite
store_reads     its part about reading
store_writes    its part about writing
store_trash     its part about removed runs
fake_engine     FakeEngine: real task directories, simulated launchers
fake_machine    the simulated launchers and their clock
couriers        real couriers over TLS on loopback
store_postgres  a PostgreSQL server for tests
"""
