// Package telemetry sets up what a daemon tells about itself: structured logs that hold no secret, traces, and metrics for
// Prometheus. It owns the set-up and the list of names that are secret; what is logged or counted belongs to the rooms.
package telemetry
