package meter

import "time"

// Reading is what one sample says of a container that is up.
type Reading struct {
	At          time.Time `json:"at"`
	CPUMicros   int64     `json:"cpu_micros"`
	MemoryBytes int64     `json:"memory_bytes"`
	Sampled     bool      `json:"sampled,omitempty"`
	Beside      bool      `json:"beside,omitempty"`
}

// confirm counts the time of the unconfirmed sample, if the accelerators have worked since.
func (iv *Interval) confirm(r Run) {
	if iv.Unconfirmed.At.IsZero() || r.NeedsDevice && iv.Unconfirmed.At.After(r.WorkedAt) {
		return
	}
	iv.count(iv.Unconfirmed)
	iv.Unconfirmed = Reading{}
}

func (iv *Interval) count(reading Reading) {
	if reading.Sampled {
		iv.sample(reading)
	}
	iv.extend(reading.At)
}
