// Package eventtest holds events that tests have written against their description in asyncapi.yaml. It is for tests
// only.
package eventtest

import (
	"context"
	"encoding/json"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/hub/api"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
)

const contractURL = "urn:gpuaas:asyncapi"

// Conform holds every event in the database against the payload that asyncapi.yaml gives for its type.
func Conform(t testing.TB, d *db.DB) {
	t.Helper()
	schemas := payloads(t)
	ctx := context.WithoutCancel(t.Context())
	subjects, err := db.ReadTx(ctx, d, func(tx db.Tx) ([]string, error) {
		rows, err := tx.Query(ctx, `SELECT DISTINCT subject FROM events`)
		if err != nil {
			return nil, err
		}
		return pgx.CollectRows(rows, pgx.RowTo[string])
	})
	require.NoError(t, err)
	for _, subject := range subjects {
		conform(ctx, t, d, schemas, subject)
	}
}

func conform(ctx context.Context, t testing.TB, d *db.DB, schemas map[string]*jsonschema.Schema, subject string) {
	t.Helper()
	events, err := db.ReadTx(ctx, d, func(tx db.Tx) ([]event.Event, error) {
		return event.BySubject(ctx, tx, event.SubjectQuery{Subject: subject})
	})
	require.NoError(t, err)
	for _, e := range events {
		ce, err := e.CloudEvent()
		require.NoError(t, err)
		raw, err := json.Marshal(ce)
		require.NoError(t, err)
		var value any
		require.NoError(t, json.Unmarshal(raw, &value))
		require.Contains(t, schemas, e.Type)
		require.NoError(t, schemas[e.Type].Validate(value), "%s: %s", e.Type, raw)
	}
}

// payloads are the compiled schemas by event type.
func payloads(t testing.TB) map[string]*jsonschema.Schema {
	t.Helper()
	var doc map[string]any
	require.NoError(t, yaml.Unmarshal(api.AsyncAPI, &doc))
	// The compiler takes the values of encoding/json.
	raw, err := json.Marshal(doc)
	require.NoError(t, err)
	var contract struct {
		Components struct {
			Messages map[string]struct {
				Name    string `json:"name"`
				Payload struct {
					Ref string `json:"$ref"`
				} `json:"payload"`
			} `json:"messages"`
		} `json:"components"`
	}
	require.NoError(t, json.Unmarshal(raw, &contract))
	var value any
	require.NoError(t, json.Unmarshal(raw, &value))
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	c.AssertFormat()
	require.NoError(t, c.AddResource(contractURL, value))
	out := map[string]*jsonschema.Schema{}
	for _, m := range contract.Components.Messages {
		out[m.Name], err = c.Compile(contractURL + m.Payload.Ref)
		require.NoError(t, err, m.Name)
	}
	return out
}

// Pass numbers the events and chains the audit trail, as a hub does within a second, and returns how many it did.
func Pass(ctx context.Context, s *event.Sequencer) (int, error) {
	events, err := s.Number(ctx)
	rows, chainErr := s.Chain(ctx)
	return events + rows, errors.Join(err, chainErr)
}
