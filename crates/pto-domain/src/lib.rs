//! Retained-domain lifecycle: keys, requests, leases, states, release order.
