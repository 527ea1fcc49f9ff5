package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// parameters merges a JSON file with NAME=VALUE pairs, which win.
func parameters(stdin io.Reader, path string, pairs []string) (map[string]any, error) {
	var out map[string]any
	if path != "" {
		text, err := readInput(stdin, path)
		if err != nil {
			return nil, usage(err)
		}
		if exactJSON(text, &out) != nil {
			return nil, usage(fmt.Errorf("%s is not a JSON object", path))
		}
	}
	for _, pair := range pairs {
		name, text, ok := strings.Cut(pair, "=")
		if !ok || name == "" {
			return nil, usage(errors.New("--param must look like NAME=VALUE"))
		}
		if out == nil {
			out = map[string]any{}
		}
		var value any
		if exactJSON([]byte(text), &value) != nil {
			value = text
		}
		out[name] = value
	}
	return out, nil
}

// exactJSON reads JSON without rounding its numbers: the hub says which it does not take.
func exactJSON(text []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the value")
	}
	return nil
}
