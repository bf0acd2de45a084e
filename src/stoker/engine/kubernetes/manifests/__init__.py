"""What is sent to a cluster for an attempt. Pure.

pod               render: all objects of an attempt
scheduling        resources, node selection, tolerations
security_context  users and permissions of containers
volumes           volumes and their mounts
template          additions by an admin or a job
credentials       the keys by which the server and its couriers know each other
"""
