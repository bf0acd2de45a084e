"""Tasks in containers of podman or docker.

tasks     brings the image, starts the launcher, finds it again, proves it gone
commands  the command lines; pure
runtime   asks podman or docker
"""
