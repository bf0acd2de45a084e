"""Conformance suites and fakes, shipped: for our own tests and for those of other engines and stores.

engine_suite    EngineSuite: what every engine must do
taskdir_suite   TaskDirSuite: what every way to a task directory must do
store_suite     what every store must do
store_case      what the parts of that suite share
store_reads     its part about reading
store_writes    its part about writing
fake_engine     FakeEngine: real task directories, simulated launchers
fake_machine    the simulated launchers and their clock
couriers        real couriers over TLS on loopback
store_postgres  a PostgreSQL server for tests
"""
