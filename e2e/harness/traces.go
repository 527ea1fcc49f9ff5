package harness

// TracesTo makes hub and agent send their spans to a collector, soon.
func TracesTo(endpoint string) []string {
	return []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + endpoint, "OTEL_BSP_SCHEDULE_DELAY=100"}
}
