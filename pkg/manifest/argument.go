package manifest

import (
	"encoding/json"
	"fmt"
)

// Argument is one element of a command: a fixed text, or a parameter's value behind an optional prefix such as
// "--token=". A value never becomes more than one argument and never passes through a shell. A parameter without a
// value leaves the argument out.
type Argument struct {
	Text      string
	Parameter string
	Prefix    string
}

type argumentJSON struct {
	Parameter string `json:"parameter"`
	Prefix    string `json:"prefix,omitempty"`
}

// MarshalJSON writes a fixed text as a string and a parameter as an object.
func (a Argument) MarshalJSON() ([]byte, error) {
	if a.Parameter == "" {
		return json.Marshal(a.Text)
	}
	return json.Marshal(argumentJSON{Parameter: a.Parameter, Prefix: a.Prefix})
}

// UnmarshalJSON reads either form.
func (a *Argument) UnmarshalJSON(data []byte) error {
	var text string
	if json.Unmarshal(data, &text) == nil {
		*a = Argument{Text: text}
		return nil
	}
	var object argumentJSON
	if err := json.Unmarshal(data, &object); err != nil {
		return fmt.Errorf("an argument is a string or an object: %w", err)
	}
	*a = Argument{Parameter: object.Parameter, Prefix: object.Prefix}
	return nil
}
