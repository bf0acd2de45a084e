"""The Kubernetes engine: tasks are pods of a cluster that outlive the server.

engine       the protocol: submit, observe, stop, watch, hurt, resize
config       what an admin says of a cluster
render       what will be sent for an attempt; pure. Its parts: placing, security, volumes, template, names
submitting   making objects, each once
observing    from what a cluster shows to what is known of tasks; pure. Its words: causes, images, unschedulable
ending       ending pods with proof, and taking away what is left
capacity     what nodes have for our tasks; pure
cluster      the connection, and mirrors of what is there (by kube/, the API client)
links, ways  the server's ends of the lines to couriers (by far/, the courier's client)
plain        tasks without a launcher
checking     what of a cluster works for us
"""
