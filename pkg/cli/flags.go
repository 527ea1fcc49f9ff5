package cli

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/pflag"
)

// timeFlag reads RFC 3339, or a time span back from now such as 24h.
type timeFlag struct{ at *time.Time }

func (f timeFlag) String() string {
	if f.at == nil {
		return ""
	}
	return stamp(*f.at)
}

// Set fits pflag.Value.
func (f timeFlag) Set(text string) error {
	if ago, err := time.ParseDuration(text); err == nil {
		*f.at = time.Now().Add(-ago).UTC()
		return nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return fmt.Errorf("neither a time like 2026-01-31T12:00:00Z nor a span like 24h")
	}
	*f.at = at.UTC()
	return nil
}

// Type fits pflag.Value.
func (timeFlag) Type() string { return "time" }

var _ pflag.Value = timeFlag{}

// linesFlag is a number of lines. None at all would be sent as if nothing had been said.
type linesFlag struct{ n *int32 }

func (f linesFlag) String() string {
	if f.n == nil || *f.n == 0 {
		return ""
	}
	return strconv.Itoa(int(*f.n))
}

// Set fits pflag.Value.
func (f linesFlag) Set(text string) error {
	n, err := strconv.ParseInt(text, 10, 32)
	if err != nil || n < 1 {
		return errors.New("not a number of lines, from 1 on")
	}
	*f.n = int32(n)
	return nil
}

// Type fits pflag.Value.
func (linesFlag) Type() string { return "int32" }

var _ pflag.Value = linesFlag{}

// lifeFlag is a time span in whole seconds. None at all would be sent as if nothing had been said.
type lifeFlag struct{ seconds *int64 }

func (f lifeFlag) String() string {
	if f.seconds == nil || *f.seconds == 0 {
		return ""
	}
	return (time.Duration(*f.seconds) * time.Second).String()
}

// Set fits pflag.Value.
func (f lifeFlag) Set(text string) error {
	d, err := time.ParseDuration(text)
	if err != nil || d < time.Second {
		return errors.New("not a time span like 720h, of a second or more")
	}
	*f.seconds = int64(d / time.Second)
	return nil
}

// Type fits pflag.Value.
func (lifeFlag) Type() string { return "duration" }

var _ pflag.Value = lifeFlag{}
