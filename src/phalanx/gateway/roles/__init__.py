"""The roles of an RL job behind the gateway: routes, choice of a replica, discovery."""
