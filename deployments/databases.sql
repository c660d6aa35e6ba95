CREATE DATABASE prefect;  -- next to that of the LightningStore, which POSTGRES_USER names
