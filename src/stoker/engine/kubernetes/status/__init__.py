"""What a cluster shows becomes observations. Pure.

observe        from pods and nodes to observations
pod_causes     why a pod does not start, or how it ended
image_errors   why an image cannot be pulled or run
unschedulable  why no node takes a pod
"""
