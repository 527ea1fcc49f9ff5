package event

import (
	"encoding/json"
	"fmt"
	"maps"
	"time"

	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

// Source is the CloudEvents source of everything that a hub tells.
const Source = "urn:gpuaas:hub"

// CloudEvent is an event as it goes over the wire: CloudEvents 1.0 in its JSON format
// (https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/formats/json-format.md).
type CloudEvent struct {
	SpecVersion     string    `json:"specversion"`
	ID              string    `json:"id"`
	Source          string    `json:"source"`
	Type            string    `json:"type"`
	Subject         string    `json:"subject"`
	Time            time.Time `json:"time"`
	DataContentType string    `json:"datacontenttype"`
	// ResourceVersion and Pos are extension attributes.
	ResourceVersion int64 `json:"resourceversion"`
	Pos             int64 `json:"pos,omitempty"`
	// Traceparent is that of the extension for distributed tracing
	// (https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/extensions/distributed-tracing.md).
	Traceparent string          `json:"traceparent,omitempty"`
	Data        json.RawMessage `json:"data"`
}

// CloudEvent is e's form on the wire. Its data holds the event's own members and, over them, who and where it belongs
// to.
func (e Event) CloudEvent() (CloudEvent, error) {
	data := map[string]any{}
	switch own := e.Data.(type) {
	case nil:
	case json.RawMessage:
		if err := json.Unmarshal(own, &data); err != nil {
			return CloudEvent{}, fmt.Errorf("event %s: %w", e.ID, err)
		}
	default:
		raw, err := json.Marshal(own)
		if err != nil {
			return CloudEvent{}, fmt.Errorf("event %s: %w", e.ID, err)
		}
		if err := json.Unmarshal(raw, &data); err != nil {
			return CloudEvent{}, fmt.Errorf("event %s: %w", e.ID, err)
		}
	}
	fixed := map[string]any{"event_id": e.ID, "correlation_id": e.CorrelationID}
	traceID := telemetry.TraceID(e.Traceparent)
	for key, value := range map[string]string{"trace_id": traceID, "org_id": e.OrgID, "project_id": e.ProjectID} {
		if value != "" {
			fixed[key] = value
		}
	}
	maps.Copy(data, fixed)
	raw, err := json.Marshal(data)
	if err != nil {
		return CloudEvent{}, fmt.Errorf("event %s: %w", e.ID, err)
	}
	return CloudEvent{
		SpecVersion: "1.0", ID: e.ID, Source: Source, Type: e.Type, Subject: e.Subject, Time: e.At.UTC(),
		DataContentType: "application/json", ResourceVersion: e.ResourceVersion, Pos: e.Pos,
		Traceparent: e.Traceparent, Data: raw,
	}, nil
}
