"""The Kubernetes engine: tasks are pods of a cluster that outlive the server.

engine           the protocol: submit, observe, stop, watch, hurt, resize
config           what an admin says of a cluster
cluster          the connection, and mirrors of what is there
names            names and labels of our objects
capacity         what nodes offer to tasks; pure
quantity         Kubernetes' quantities; pure
manifests/       what is sent for an attempt; pure
lifecycle/       create, resize and delete pods
status/          from what a cluster shows to observations; pure
courier_client/  task directories in pods
api/             the client of the API server
job_validation   what a cluster will not run; pure
preflight        `stoker cluster check`
fault_injection  `drill` and `shell`
"""
