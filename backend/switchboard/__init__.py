"""The streams that connect gateways, coordinators and the allocator."""
