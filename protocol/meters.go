package protocol

// Meters that a node measures for a member, with the base unit of UsageRecord.quantity.
const (
	// MeterSessionSeconds is the time a member ran, in microseconds.
	MeterSessionSeconds = "session_seconds"
	// MeterAcceleratorSeconds is the time a container with accelerators ran, times their number, in microseconds.
	MeterAcceleratorSeconds = "accelerator_seconds"
	// MeterCPUSeconds is processor time, in microseconds.
	MeterCPUSeconds = "cpu_seconds"
	// MeterMemoryByteSeconds is memory held over time, in byte-seconds.
	MeterMemoryByteSeconds = "memory_byte_seconds"
)
